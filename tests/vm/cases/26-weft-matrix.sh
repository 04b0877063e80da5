# needs: weft
# seconds: 600
# long: 12 of the 192 forms of a device that pins pages, with each pair of bits, otherwise 5
# The matrix of fi_mr(3) (tests/mr) on a device that pins pages: after the pages of a region are
# replaced, a peer accesses the old ones until fi_mr_refresh, and then the new ones. Five forms:
# native, MMU_NOTIFY, MMU_NOTIFY with the fewest bits, counted with raw keys, bound to endpoints;
# each with connected endpoints and with endpoints that have many peers. A form without ALLOCATED
# and MMU_NOTIFY must be refused. On-demand regions are refused by weft on Linux 7.2.13
# (18-weft-table), so all forms are pinned.
FORMS="LOCAL,VIRT_ADDR,ALLOCATED,PROV_KEY LOCAL,VIRT_ADDR,PROV_KEY,MMU_NOTIFY MMU_NOTIFY
	RAW,MMU_NOTIFY,RMA_EVENT ALLOCATED,PROV_KEY,ENDPOINT"

# the fewest forms that have each pair of values of two bits (tests/mr/check)
PAIRS="LOCAL,RAW,VIRT_ADDR,ALLOCATED,PROV_KEY,RMA_EVENT,ENDPOINT ALLOCATED,RMA_EVENT,ENDPOINT
	LOCAL,RAW,VIRT_ADDR,PROV_KEY,MMU_NOTIFY VIRT_ADDR,PROV_KEY,MMU_NOTIFY,RMA_EVENT,ENDPOINT LOCAL,RAW,ALLOCATED
	RAW,ALLOCATED,PROV_KEY,MMU_NOTIFY,ENDPOINT LOCAL,VIRT_ADDR,MMU_NOTIFY,RMA_EVENT"

form() { # MODE ROLE
	FI_WEFT_MR_MODE=$1 with weft timeout 120 "$WEFT_PROJECT/build/vm/abi-probe" libfabric.so.1 "$2" >"/tmp/out-$1-$2" 2>&1
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
	[ -n "$WEFT_VM_LONG" ] && FORMS="$FORMS $PAIRS"
	export -f form with
	export WEFT_DIR WEFT_PROJECT
	for mode in $FORMS; do
		echo "$mode matrix"
		echo "$mode matrix-rdm"
	done >/tmp/forms
	# two at a time: half of a run is the start of libfabric
	xargs -P 2 -n 2 bash -c 'form "$0" "$1"' </tmp/forms | tee /tmp/results
	[ "$(grep -c '^ok ' /tmp/results)" = "$(wc -l </tmp/forms)" ]
}
