# needs: weft
# seconds: 900
# long: 140 runs of the conformance programs, otherwise 10; with WEFT_VM_ALL=1 also those with 1,000 revocations
# The programs of the conformance tier on rxe0 (tests/vm/programs/runs): every form of registration
# as the target of RMA, RMA and atomics of endpoints with many peers, long messages, shared receive
# contexts, events by FETCH_ADD, authorization keys, registration in the background, revocation
# of keys that idle and busy peers hold. rxe pins, so hints without FI_MR_ALLOCATED and
# FI_MR_MMU_NOTIFY get FI_MR_ALLOCATED (WEFT_TEST_PINS). It does not report whether a request on a
# link that breaks was executed (WEFT_TEST_UNKNOWN).
run() {
	ran=0
	failed=0
	while read -r form program mode more; do
		limit=120
		case $form in
		short) ;;
		long) [ -n "$WEFT_VM_LONG" ] || continue ;;
		all) [ -n "$WEFT_VM_ALL" ] && limit=400 || continue ;;
		*) continue ;;
		esac
		[ "$mode" = - ] && mode=
		start=$(date +%s%N)
		# shellcheck disable=SC2086 # further arguments are words
		WEFT_TEST_PINS=1 WEFT_TEST_SLOW=1 WEFT_TEST_UNKNOWN=1 FI_WEFT_DEVICE=rxe0 FI_PROVIDER_PATH=$WEFT_DIR FI_PROVIDER=^ofi_rxm \
			timeout -k 2 $limit "$WEFT_PROJECT/build/vm/$program" $mode weft 10.77.0.1 $more >/tmp/out 2>&1 </dev/null
		status=$?
		ran=$((ran + 1))
		# 77: fi_getinfo does not offer the form, so the line does not belong in this list
		if [ $status = 0 ]; then
			echo "ok   $program $mode $more ($((($(date +%s%N) - start) / 100000000)) tenths of a second)"
		else
			echo "FAIL $program $mode $more: status $status"
			tail -10 /tmp/out
			failed=$((failed + 1))
		fi
	done <"$WEFT_VM/programs/runs"
	echo "$ran runs, $failed failed"
	[ $ran -ge 10 ] && [ $failed = 0 ]
}
