"""An app with handlers that behave, and handlers that don't, for the tests of the workers."""
