"""One module a command: ``commands/<name>.py`` with a ``COMMAND`` is ``gemmule <name>``."""
