# needs: weft mpich
# seconds: 120
# MPICH with 2 ranks in one guest, on weft's RDM endpoints on rxe0: messages, a collective and MPI_Put.
run() {
	mpi_env
	mpiexec -n 2 python3 -m mpi4py "$WEFT_VM/programs/mpi.py" >/tmp/out 2>&1 || { tail -30 /tmp/out; return 1; }
	grep '^libfabric provider: ' /tmp/out
	grep -q '^libfabric provider: weft - ' /tmp/out && grep '^mpi: ok, 2 ranks' /tmp/out
}
