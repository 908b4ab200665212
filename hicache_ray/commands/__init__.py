"""The commands of the command line, one a module: each has a `command`, a click command."""
