# needs: weft
# Shared regions on a kernel device: a memfd registered by each process; RMA and atomics from a
# third process through an importer's region after the owner has ended. No region of weft is on
# demand on this rxe (18-weft-table), so the example of prefetching does not run here.
run() {
	with weft "$WEFT_PROJECT/build/vm/shared_table" 10.77.0.1 || return 1
	FI_WEFT_SOFTVERBS=0 with weft "$WEFT_PROJECT/build/vm/prefetch" 10.77.0.1
	[ $? = 77 ]
}
