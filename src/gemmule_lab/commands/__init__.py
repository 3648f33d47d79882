"""One module a command: ``<name>.py``, here or in a folder, with a ``COMMAND``."""
