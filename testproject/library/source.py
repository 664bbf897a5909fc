"""Python source files: where those of the standard library are, and what is in one."""

import ast
import sysconfig
from dataclasses import dataclass
from pathlib import Path

POISON = Path(__file__).parent / "poison"


@dataclass(frozen=True)
class Module:
    """A source file, by the name under which it would be imported."""

    path: Path
    name: str
    size: int

    @property
    def package(self) -> str:
        """The top-level package, or for a module without one the module itself."""
        return self.name.partition(".")[0]


def standard_library() -> list[Module]:
    """Return the modules of the running Python's standard library, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = [
        Module(path, _module_name(path.relative_to(root)), path.stat().st_size)
        for path in root.rglob("*.py")
        if not {"site-packages", "dist-packages"} & {*path.relative_to(root).parts}
        and path.is_file()
    ]
    return sorted(modules, key=lambda module: module.name)


def poison() -> list[Module]:
    """Return what can't be read as a module: the files of this app, and one that is gone."""
    return [
        *(
            Module(path, f"poison.{path.name.removesuffix('.py.txt')}", path.stat().st_size)
            for path in sorted(POISON.glob("*.py.txt"))
        ),
        Module(POISON / "vanished.py.txt", "poison.vanished", 0),
    ]


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def figures(path: Path) -> dict[str, int | str]:
    """
    Return what a report says of the module at *path*.

    Raise `SyntaxError` or `ValueError` if it isn't Python, `MemoryError` or `RecursionError`
    if it is nested too deeply for the parser.
    """
    # Bytes, so that the file's own declaration of its encoding counts.
    source = path.read_bytes()
    nodes = list(ast.walk(ast.parse(source, path.name)))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    longest = max(functions, key=_length, default=None)
    return {
        "lines": len(source.splitlines()),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "functions": len(functions),
        "longest_function": longest.name[:200] if longest else "",
        "longest_function_lines": _length(longest) if longest else 0,
    }


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1
