# needs: weft
# seconds: 900
# long: 22 modes, each with both kinds of progress; otherwise those that depend on the device
# The calls of endpoints with many peers on rxe0: the modes of tests/conformance/c/rdm.c. `many` and
# `flood`, with 10,000 and 100,000 messages, run with WEFT_VM_ALL=1.
rdm() {
	if FI_WEFT_DEVICE=rxe0 FI_PROVIDER_PATH=$WEFT_DIR FI_PROVIDER=^ofi_rxm \
		WEFT_TEST_SLOW=1 timeout 600 "$WEFT_PROJECT/build/vm/rdm" $1 weft 10.77.0.1 $2 >/tmp/rdm 2>&1; then
		echo "ok   $1 $2"
	else
		echo "FAIL $1 $2: $(cat /tmp/rdm)"
		failed=1
	fi
}

run() {
	failed=0
	for mode in variants inject asleep levels regions both parting dead; do
		rdm $mode auto
	done
	rdm variants manual
	rdm both manual
	if [ -n "$WEFT_VM_LONG" ]; then
		for mode in inject asleep levels regions parting dead; do
			rdm $mode manual
		done
		for mode in unexpected tags directed source multi search cancel truncated selective \
			counters readerr self removed objects; do
			rdm $mode manual
			rdm $mode auto
		done
	fi
	if [ -n "$WEFT_VM_ALL" ]; then
		for mode in many flood; do
			rdm $mode manual
			rdm $mode auto
		done
	fi
	return $failed
}
