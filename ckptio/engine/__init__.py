"""Plain coroutines that carry a plan out. They run on any loop, a virtual one included."""
