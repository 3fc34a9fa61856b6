"""The command line, `ckptio`. Needs the extra `cli`; and torch for `diff` and `convert` alone."""
