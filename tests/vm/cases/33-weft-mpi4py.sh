# needs: weft mpich
# seconds: 1800
# long: the modules of mpi4py's tests that `make check-mpi` runs, otherwise messages of buffers
# long-seconds: 5400
# mpi4py's own tests on MPICH with 2 ranks in one guest, on weft's RDM endpoints on rxe0: messages,
# collectives, requests, threads, connected processes, sessions, windows and RMA (SHORT in
# tests/mpi/check). On a host with a load of 8 one test took 332 s. The modules that `make check-mpi`
# leaves out test datatypes, handles and files, which take no provider, and compute in the ranks, for
# more than 15 minutes here.
MODULES='test_(p2p|cco|msgzero|request|threads|util_pkl5|util_sync|comm|rma|win|dynproc|session|status)'
run() {
	mpi_env
	[ -n "$WEFT_VM_LONG" ] || MODULES='test_p2p_buf\.py'
	python3 "$WEFT_PROJECT/tests/mpi/check" --here "$folder/tests" --mpi mpich --ranks 2 --slow 30 \
		--test-seconds 900 --run-seconds 5000 --only "$MODULES"
}
