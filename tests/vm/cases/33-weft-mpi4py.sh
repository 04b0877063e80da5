# needs: weft mpich
# seconds: 1800
# long: mpi4py's modules of messages, collectives, requests and connected processes, otherwise messages of buffers
# later: 32 runs MPICH on the device, and make check-mpi these tests on soft0
# mpi4py's own tests on MPICH with 2 ranks in one guest, on weft's RDM endpoints on rxe0. The bound of
# `make check-long` has no room for threads, pickled and synchronized objects, partitioned messages,
# sessions, windows and RMA, of which one test took 332 s on a host with a load of 8. WEFT_VM_ALL=1
# runs all modules that `make check-mpi` runs (SHORT in tests/mpi/check). The modules that it leaves
# out too test datatypes, handles and files, and compute in the ranks, for more than 15 minutes here.
MODULES='test_(cco_.*|comm.*|dynproc|msgzero|request|p2p_buf|p2p_buf_matched|p2p_obj|p2p_obj_matched)\.py'
ALL='test_(p2p|cco|msgzero|request|threads|util_pkl5|util_sync|comm|rma|win|dynproc|session|status)'
run() {
	mpi_env
	[ -n "$WEFT_VM_LONG" ] || MODULES='test_p2p_buf\.py'
	[ -z "$WEFT_VM_ALL" ] || MODULES=$ALL
	python3 "$WEFT_PROJECT/tests/mpi/check" --here "$folder/tests" --mpi mpich --ranks 2 --slow 30 \
		--test-seconds 600 --run-seconds 5000 --only "$MODULES"
}
