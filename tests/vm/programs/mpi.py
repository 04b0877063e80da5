"""Messages and one-sided operations between all ranks, every byte compared; prints one line.

A rank that has not ended after 80 s prints the line at which it waits, and exits. Run by `python3
-m mpi4py`, an exception of one rank ends all.
"""

import faulthandler

faulthandler.dump_traceback_later(80, exit=True)

from mpi4py import MPI  # noqa: E402

world = MPI.COMM_WORLD
rank, size = world.rank, world.size


def pattern(source, length):
    return bytes((source * 37 + i * 11 + i // 256) % 256 for i in range(length))


for length in (1, 100, 5000, 200_000):
    to, source = (rank + 1) % size, (rank - 1) % size
    got = bytearray(length)
    world.Sendrecv(pattern(rank, length), to, recvbuf=got, source=source)
    assert bytes(got) == pattern(source, length), f"rank {rank}: a message of {length} bytes"
assert world.allreduce(rank + 1) == size * (size + 1) // 2
window = MPI.Win.Allocate(65536, comm=world)
window.Fence()
origin = pattern(rank, 65536)  # MPI reads it until the fence
window.Put(origin, (rank + 1) % size)
window.Fence()
assert bytes(window.tomemory()) == pattern((rank - 1) % size, 65536), f"rank {rank}: MPI_Put"
window.Free()
hosts = len(set(world.allgather(MPI.Get_processor_name())))
if rank == 0:
    print(f"mpi: ok, {size} ranks on {hosts} hosts", flush=True)
