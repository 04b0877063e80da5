# needs: weft mpich
# seconds: 1800
# long: mpi4py's modules of messages, collectives, requests and connected processes, otherwise messages of buffers
# mpi4py's own tests on MPICH with 2 ranks in one guest, on weft's RDM endpoints on rxe0. Left out
# of the modules that `make check-mpi` runs (SHORT in tests/mpi/check) are those of which one test
# takes more than a minute in a guest on a busy host, partitioned communication and RMA, and those
# that were not reached there: threads, pickled and synchronized objects, sessions and windows. The
# modules that `make check-mpi` leaves out compute in the ranks, for more than 15 minutes here.
MODULES='test_(cco_.*|comm.*|dynproc|msgzero|request|p2p_buf|p2p_buf_matched|p2p_obj|p2p_obj_matched)\.py'
run() {
	mpi_env
	[ -n "$WEFT_VM_LONG" ] || MODULES='test_p2p_buf\.py'
	python3 "$WEFT_PROJECT/tests/mpi/check" --here "$folder/tests" --mpi mpich --ranks 2 --slow 10 --only "$MODULES"
}
