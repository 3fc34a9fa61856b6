"""Bytes on disk: buckets, manifests, values and checksums. Pure; see README.md beside this."""
