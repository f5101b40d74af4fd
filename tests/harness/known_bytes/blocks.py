"""Touch a known number of bytes in a fresh process and print what the meter says: `python blocks.py NAME ARGUMENT`.

Each function is one experiment; its first use of a library is paid before the meter starts.
"""

import json
import sys

from harness.machine import memory

MIB = 1 << 20
SIZES = (16 * MIB, 64 * MIB, 256 * MIB)


def numpy_block():
    import numpy as np

    return lambda size: np.ones(size // 8)


def torch_block():
    import torch

    torch.set_num_threads(1)
    return lambda size: torch.ones(size // 4)


def jax_block():
    """Compile for every size ahead: compiling takes memory of its own."""
    import jax
    import jax.numpy as jnp

    def compiled(size):
        return jax.jit(lambda x: jnp.full(size // 4, x)).lower(jnp.float32(0)).compile()

    fill = {size: compiled(size) for size in (MIB, *SIZES, SIZES[-1] * 4)}
    return lambda size: fill[size](jnp.float32(1)).block_until_ready()


def locked_block():
    """Fill and free in one C call that never lets go of the interpreter lock: no sampler inside could run."""
    return lambda size: len(b"x" * size)


BLOCKS = {"numpy": numpy_block, "torch": torch_block, "jax": jax_block, "locked": locked_block}


def ready(library):
    touch = BLOCKS[library]()
    touch(MIB)
    memory.settle()
    return touch


def started():
    meter = memory.PhaseMeter()
    meter.start()
    assert memory.mark_is_low()
    return meter


def peaks(library):
    """Bytes measured for each size, made and freed within one phase."""
    touch, found = ready(library), {}
    for size in SIZES:
        memory.settle()
        meter = started()
        with meter.phase("touch"):
            touch(size)
        found[size] = meter.peak_bytes
    return found


def halves(library):
    """A phase that makes and frees 64 MiB, then one of 32 MiB."""
    touch = ready(library)
    meter = started()
    for name, size in (("whole", 64 * MIB), ("half", 32 * MIB)):
        with meter.phase(name):
            touch(size)
    return {name: phase.peak_bytes for name, phase in meter.phases.items()}


def history(earlier_bytes):
    """Grow a buffer to 30 MiB by copies, small blocks made in between, after an earlier block was freed.

    What the C library learns from the earlier block decides whether the outgrown copies return to the system.
    """
    import ctypes

    c = ctypes.CDLL(None)
    c.malloc.restype, c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    c.free.argtypes, c.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    c.memset.restype = None

    def block(size):
        address = c.malloc(size)
        c.memset(address, 1, size)
        return address

    if int(earlier_bytes):
        c.free(block(int(earlier_bytes)))
    memory.settle()
    meter = started()
    with meter.phase("grow"):
        buffer = block(MIB)
        for mib in range(2, 31, 2):
            larger = block(mib * MIB)
            c.free(buffer)
            buffer = larger
            block(4096)
    return meter.peak_bytes


def untouched(_):
    """1 GiB asked for and not written, then one byte written every 2 MiB."""
    import numpy as np

    np.empty(MIB, np.uint8)[:] = 1
    memory.settle()
    meter = started()
    with meter.phase("empty"):
        block = np.empty(1 << 30, np.uint8)
    with meter.phase("sparse"):
        block[:: 2 * MIB] = 1
    return {name: phase.peak_bytes for name, phase in meter.phases.items()}


def mapped(path):
    """The growth by class while 64 MiB of a file are read through a map."""
    import numpy as np

    np.zeros(8).sum()
    memory.settle()
    meter = started()
    with meter.phase("read"):
        rows = np.memmap(path, np.uint8, "r")
        total = int(rows.sum())
    phase = meter.phases["read"]
    return {"total": total, "peak": phase.peak_bytes, "file": phase.file_bytes, "anon": phase.anon_bytes}


def budget(library):
    """Ask for 32 MiB and for 256 MiB within a budget of 64 MiB, and for 256 MiB when it is over."""
    from harness import backends

    touch = ready(library)
    touch(256 * MIB)
    backend = backends.load("jax" if library == "jax" else "torch")
    found = {}
    with memory.budget(64 * MIB) as limit:
        found["limit"] = limit
        found["allowed"] = limit - memory.read().data
        touch(16 * MIB)
        try:
            touch(256 * MIB)
        except Exception as error:
            found["types"] = [kind.__name__ for kind in type(error).__mro__]
            found["message"] = str(error)
            found["ran_out"] = backend.ran_out(error)
            found["other"] = backend.ran_out(ValueError("a size of 256 is wrong"))
    touch(256 * MIB)
    found["lifted"] = True
    return found


def library_scratch(library):
    """Run a program within its plan (32 MiB) and 4 MiB more: less than XLA's CPU library takes beside the plan."""
    import jax
    import jax.numpy as jnp

    from harness import backends

    def attention(queries):
        scores = jnp.einsum("bhqd,bhkd->bhqk", queries, queries)
        return (jax.nn.softmax(scores).sum(2) ** 2).sum()

    queries = jnp.ones((2, 4, 1024, 64))
    program = jax.jit(jax.grad(attention)).lower(queries).compile()
    jax.block_until_ready(program(queries))
    planned, seen = program.memory_analysis().temp_size_in_bytes, {}
    try:
        with memory.budget(planned + 4 * MIB):
            jax.block_until_ready(program(queries))
    except Exception as error:
        seen["message"] = str(error)
        seen["ran_out"] = backends.load(library).ran_out(error)
    return seen


DEVICE_SIZES = (1, 512, 513, MIB + 1, 10 * MIB + 1, 64 * MIB, 100 * MIB + 12_345)


def on_device(backend_name):
    """The device's counters while one array of each size lives, in an otherwise idle process."""
    from harness import backends
    from harness.contract.place import Place

    place = Place(backend_name, "cuda")
    backend = backends.load(backend_name)
    backend.start(place)
    make = _torch_bytes() if backend_name == "torch" else _jax_bytes()
    make(1)
    found = {}
    for size in DEVICE_SIZES:
        backend.wait(None)
        backend.clear(place)
        backend.reset_peak(place)
        held = make(size)
        backend.wait(held)
        found[size] = backend.peak(place)
        del held
    return found


def _torch_bytes():
    import torch

    return lambda size: torch.empty(size, dtype=torch.uint8, device="cuda")


def _jax_bytes():
    import jax
    import jax.numpy as jnp

    return lambda size: jax.block_until_ready(jnp.zeros(size, jnp.uint8))


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
