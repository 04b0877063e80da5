# needs: weft
# seconds: 2400
# long: all 192 forms that a device which pins pages can have, otherwise 5 of them
# The matrix of fi_mr(3) (tests/mr) on a device that pins pages: after the pages of a region are
# replaced, a peer accesses the old ones until fi_mr_refresh, and then the new ones. Five forms:
# native, MMU_NOTIFY, MMU_NOTIFY with the fewest bits, counted with raw keys, bound to endpoints;
# each with connected endpoints and with endpoints that have many peers. A form without ALLOCATED
# and MMU_NOTIFY must be refused. On-demand regions are refused by weft on Linux 7.2.13
# (18-weft-table), so all forms are pinned.
FORMS="LOCAL,VIRT_ADDR,ALLOCATED,PROV_KEY LOCAL,VIRT_ADDR,PROV_KEY,MMU_NOTIFY MMU_NOTIFY
	RAW,MMU_NOTIFY,RMA_EVENT ALLOCATED,PROV_KEY,ENDPOINT"

every_form() {
	for local in "" LOCAL,; do for raw in "" RAW,; do for virtual in "" VIRT_ADDR,; do for prov in "" PROV_KEY,; do
		for event in "" RMA_EVENT,; do for endpoint in "" ENDPOINT,; do
			for paging in ALLOCATED MMU_NOTIFY ALLOCATED,MMU_NOTIFY; do
				echo "$local$raw$virtual$prov$event$endpoint$paging"
			done
		done; done
	done; done; done; done
}

form() { # MODE ROLE
	FI_WEFT_MR_MODE=$1 with weft "$WEFT_PROJECT/build/vm/abi-probe" libfabric.so.1 "$2" >"/tmp/out-$1-$2" 2>&1
	status=$?
	if [ $status = 0 ] && [ "$(grep -c '^ok ' "/tmp/out-$1-$2")" = 12 ]; then
		echo "ok   $1 $2"
	else
		echo "FAIL $1 $2: status $status"
		cat "/tmp/out-$1-$2"
	fi
	rm "/tmp/out-$1-$2"
}

run() {
	export WEFT_PROBE_NODE=10.77.0.1 WEFT_PROBE_PINS=1 FI_WEFT_DEVICE=rxe0 RUST_BACKTRACE=0
	for mode in none LOCAL,VIRT_ADDR,PROV_KEY RAW,RMA_EVENT,ENDPOINT; do
		FI_WEFT_MR_MODE=$mode with weft fi_info -p weft -d rxe0 >/tmp/out 2>&1 && { echo "$mode is offered"; return 1; }
	done
	[ -n "$WEFT_VM_LONG" ] && FORMS=$(every_form)
	export -f form with
	export WEFT_DIR WEFT_PROJECT
	for mode in $FORMS; do
		echo "$mode matrix"
		echo "$mode matrix-rdm"
	done >/tmp/forms
	# two at a time: half of a run is the start of libfabric
	xargs -P 2 -n 2 bash -c 'form "$0" "$1"' </tmp/forms >/tmp/results
	cat /tmp/results
	[ "$(grep -c '^ok ' /tmp/results)" = "$(wc -l </tmp/forms)" ]
}
