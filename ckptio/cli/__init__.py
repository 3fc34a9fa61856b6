"""The command line: `ckptio ls`, `show` and `verify`. Needs the extra `cli`, and no torch."""
