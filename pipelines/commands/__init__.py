"""The subcommands of `strop`, one file each."""
