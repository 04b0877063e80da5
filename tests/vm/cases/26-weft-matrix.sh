# needs: weft
# seconds: 1200
# long: 13 of the 192 forms of a device that pins pages, with each pair of bits, otherwise 5
# The matrix of fi_mr(3) (tests/mr) on a device that pins pages: after the pages of a region are
# replaced, a peer accesses the old ones until fi_mr_refresh, and then the new ones. Five forms:
# native, MMU_NOTIFY, MMU_NOTIFY with the fewest bits, counted with raw keys, native and bound to
# endpoints.
# `WEFT_VM_ALL=1 tests/vm/check 26-weft-matrix` runs every form that has ALLOCATED or MMU_NOTIFY.
# Each with connected endpoints and with endpoints that have many peers, in one process, because
# half of a run is the start of libfabric. A form without ALLOCATED and MMU_NOTIFY must be refused.
# On-demand regions are refused by weft on Linux 7.2.13 (18-weft-table), so all forms are pinned.
FORMS="LOCAL,VIRT_ADDR,ALLOCATED,PROV_KEY LOCAL,VIRT_ADDR,PROV_KEY,MMU_NOTIFY MMU_NOTIFY
	RAW,MMU_NOTIFY,RMA_EVENT VIRT_ADDR,ALLOCATED,PROV_KEY,ENDPOINT"
REFUSED="none LOCAL,VIRT_ADDR,PROV_KEY RAW,RMA_EVENT,ENDPOINT"

# With FORMS they have each pair of values of two bits.
PAIRS="LOCAL,RAW,VIRT_ADDR,ALLOCATED,PROV_KEY,RMA_EVENT,ENDPOINT ALLOCATED,RMA_EVENT,ENDPOINT
	LOCAL,RAW,VIRT_ADDR,PROV_KEY,MMU_NOTIFY VIRT_ADDR,PROV_KEY,MMU_NOTIFY,RMA_EVENT,ENDPOINT LOCAL,RAW,ALLOCATED
	RAW,ALLOCATED,PROV_KEY,MMU_NOTIFY,ENDPOINT LOCAL,VIRT_ADDR,MMU_NOTIFY,RMA_EVENT
	ALLOCATED,PROV_KEY,ENDPOINT"

# Prints the forms that have (1) or lack (0) a bit that a device without on-demand paging requires.
all_forms() { # 1|0
	python3 -c '
import itertools, sys
bits = ["LOCAL", "RAW", "VIRT_ADDR", "ALLOCATED", "PROV_KEY", "MMU_NOTIFY", "RMA_EVENT", "ENDPOINT"]
for chosen in itertools.product((False, True), repeat=len(bits)):
    form = list(itertools.compress(bits, chosen))
    if ("ALLOCATED" in form or "MMU_NOTIFY" in form) == (sys.argv[1] == "1"):
        print(",".join(form) or "none")
' "$1"
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

refused() { # MODE
	FI_WEFT_MR_MODE=$1 with weft fi_info -p weft -d rxe0 >"/tmp/out-$1" 2>&1
	status=$?
	# fi_info ends with the errno: ENODATA; another error would be no refusal
	if [ $status = 61 ]; then
		echo "ok   $1 is not offered"
	else
		echo "FAIL $1 is not refused: status $status"
		cat "/tmp/out-$1"
	fi
	rm "/tmp/out-$1"
}

run() {
	export WEFT_PROBE_NODE=10.77.0.1 WEFT_PROBE_PINS=1 FI_WEFT_DEVICE=rxe0 RUST_BACKTRACE=0
	[ -n "$WEFT_VM_LONG" ] && FORMS="$FORMS $PAIRS"
	if [ -n "$WEFT_VM_ALL" ]; then
		FORMS=$(all_forms 1)
		REFUSED=$(all_forms 0)
	fi
	export -f form refused with
	export WEFT_DIR WEFT_PROJECT
	for mode in $REFUSED; do echo "refused $mode"; done >/tmp/forms
	for mode in $FORMS; do echo "form $mode"; done >>/tmp/forms
	# two at a time: the guest has two processors
	xargs -P 2 -n 2 bash -c '"$0" "$1"' </tmp/forms | tee /tmp/results
	count=$(wc -l </tmp/forms)
	echo "$count forms"
	[ "$count" -ge 8 ] && [ "$(grep -c '^ok ' /tmp/results)" = "$count" ]
}
