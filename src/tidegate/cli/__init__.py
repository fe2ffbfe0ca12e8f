"""The ``tidegate`` command: one thin file a subcommand, imported only when it is called."""
