# needs: weft
# Shared regions on a device of the kernel: a memfd registered by each process, RMA and atomics from a third one through an importer's
# region when the owner has gone. No region of weft is on demand on this rxe (18-weft-table), so the other example has nothing to fetch.
run() {
	with weft "$WEFT_PROJECT/build/vm/shared_table" 10.77.0.1 || return 1
	FI_WEFT_SOFTVERBS=0 with weft "$WEFT_PROJECT/build/vm/prefetch" 10.77.0.1
	[ $? = 77 ]
}
