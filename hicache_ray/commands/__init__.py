"""The commands of the command line, one a module: NAME.py has NAME_command, a click command."""
