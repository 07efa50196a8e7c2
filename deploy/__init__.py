"""Putting it together: the command line, the configuration file, the embedded servers, the one-machine supervisor."""
