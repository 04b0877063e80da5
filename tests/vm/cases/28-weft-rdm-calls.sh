# needs: weft
# seconds: 900
# The calls of endpoints with many peers on rxe0: the modes of tests/conformance/c/rdm.c, except
# many and flood, which send 10,000 and 100,000 messages: the emulation is too slow for them.
run() {
	failed=0
	for mode in variants inject unexpected tags directed source multi search cancel truncated \
		selective counters asleep readerr levels regions self both parting dead removed objects; do
		for progress in manual auto; do
			if FI_WEFT_RDM=1 FI_WEFT_DEVICE=rxe0 FI_PROVIDER_PATH=$WEFT_DIR FI_PROVIDER=^ofi_rxm \
				timeout 120 "$WEFT_PROJECT/build/vm/rdm" $mode weft 10.77.0.1 $progress >/tmp/rdm 2>&1; then
				echo "ok   $mode $progress"
			else
				echo "FAIL $mode $progress: $(cat /tmp/rdm)"
				failed=1
			fi
		done
	done
	return $failed
}
