# needs: weft
# seconds: 600
# The matrix of fi_mr(3) (tests/mr) on a device that pins pages: after the pages of a region are
# replaced, a peer accesses the old ones until fi_mr_refresh, and then the new ones. Five forms:
# native, MMU_NOTIFY, MMU_NOTIFY with the fewest bits, counted with raw keys, bound to endpoints;
# each with connected endpoints and with endpoints that have many peers.
run() {
	for mode in LOCAL,VIRT_ADDR,ALLOCATED,PROV_KEY LOCAL,VIRT_ADDR,PROV_KEY,MMU_NOTIFY MMU_NOTIFY RAW,MMU_NOTIFY,RMA_EVENT ALLOCATED,PROV_KEY,ENDPOINT; do
		export WEFT_PROBE_NODE=10.77.0.1 WEFT_PROBE_PINS=1 FI_WEFT_DEVICE=rxe0 FI_WEFT_MR_MODE=$mode RUST_BACKTRACE=0
		for role in matrix matrix-rdm; do
			echo "$mode $role"
			with weft "$WEFT_PROJECT/build/vm/abi-probe" libfabric.so.1 $role >/tmp/out 2>&1
			status=$?
			[ $status = 0 ] && [ "$(grep -c '^ok ' /tmp/out)" = 12 ] || { cat /tmp/out; return 1; }
		done
	done
}
