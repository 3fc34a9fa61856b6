"""A stand-in for CUDA: the tests of the GPU path on a machine without a GPU.

torch's own build for CUDA runs, with everything it does on the host: its streams and events,
its allocators, what it makes of a copy. Only the library below it is another one. `runtime` is
a `libcudart.so.12` whose streams are threads, which begin what they are told late, in a seeded
order, and which knows CUDA's rules: what may be called during a capture, which copies are
asynchronous, which device an event is of, where a context is made. It ends the program when a
copy uses memory that was given back, or takes one kind of memory for another, and when the host
reads or writes at a device's address. `operators` does on the CPU what kernels would do, when
their stream comes to it.

So it shows orders that are wrong, with more certainty than a GPU, on which most go well by
chance. It shows nothing of speed, nor of how a driver behaves beyond what is written down.

`nox -s standin` builds and uses it. Needs g++ and torch's build for CUDA 12.4 (2.6.0).
"""
