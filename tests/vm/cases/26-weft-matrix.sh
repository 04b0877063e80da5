# needs: weft
# seconds: 2700
# long: all 192 forms of a device that pins pages, otherwise 5
# The matrix of fi_mr(3) (tests/mr) on a device that pins pages: after the pages of a region are
# replaced, a peer accesses the old ones until fi_mr_refresh, and then the new ones. Five forms:
# native, MMU_NOTIFY, MMU_NOTIFY with the fewest bits, counted with raw keys, bound to endpoints;
# with --long every form that has ALLOCATED or MMU_NOTIFY. Each with connected endpoints and with
# endpoints that have many peers, in one process, because half of a run is the start of libfabric. A
# form without ALLOCATED and MMU_NOTIFY must be refused. On-demand regions are refused by weft on
# Linux 7.2.13 (18-weft-table), so all forms are pinned.
FORMS="LOCAL,VIRT_ADDR,ALLOCATED,PROV_KEY LOCAL,VIRT_ADDR,PROV_KEY,MMU_NOTIFY MMU_NOTIFY
	RAW,MMU_NOTIFY,RMA_EVENT ALLOCATED,PROV_KEY,ENDPOINT"

all_forms() {
	python3 -c '
import itertools
bits = ["LOCAL", "RAW", "VIRT_ADDR", "ALLOCATED", "PROV_KEY", "MMU_NOTIFY", "RMA_EVENT", "ENDPOINT"]
for chosen in itertools.product((False, True), repeat=len(bits)):
    form = list(itertools.compress(bits, chosen))
    if "ALLOCATED" in form or "MMU_NOTIFY" in form:
        print(",".join(form))
'
}

form() { # MODE
	FI_WEFT_MR_MODE=$1 with weft timeout 240 "$WEFT_PROJECT/build/vm/abi-probe" libfabric.so.1 matrix-both >"/tmp/out-$1" 2>&1
	status=$?
	if [ $status = 0 ] && [ "$(grep -c '^ok ' "/tmp/out-$1")" = 24 ]; then
		echo "ok   $1"
	else
		echo "FAIL $1: status $status"
		cat "/tmp/out-$1"
	fi
	rm "/tmp/out-$1"
}

run() {
	export WEFT_PROBE_NODE=10.77.0.1 WEFT_PROBE_PINS=1 FI_WEFT_DEVICE=rxe0 RUST_BACKTRACE=0
	for mode in none LOCAL,VIRT_ADDR,PROV_KEY RAW,RMA_EVENT,ENDPOINT; do
		FI_WEFT_MR_MODE=$mode with weft fi_info -p weft -d rxe0 >/tmp/out 2>&1 && { echo "$mode is offered"; return 1; }
	done
	[ -n "$WEFT_VM_LONG" ] && FORMS=$(all_forms)
	export -f form with
	export WEFT_DIR WEFT_PROJECT
	printf '%s\n' $FORMS >/tmp/forms
	# two at a time: the guest has two processors
	xargs -P 2 -n 1 bash -c 'form "$0"' </tmp/forms | tee /tmp/results
	[ "$(wc -l </tmp/forms)" = "$([ -n "$WEFT_VM_LONG" ] && echo 192 || echo 5)" ] || return 1
	[ "$(grep -c '^ok ' /tmp/results)" = "$(wc -l </tmp/forms)" ]
}
