"""The engine while it runs: its own loop on a thread of its own, and the way there and back.

What stands here knows of threads, of the caller's thread and loop, of handles and of the end of
the program. What goes on in the loop are the plain coroutines of `engine`.
"""
