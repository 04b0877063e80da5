# guest: pair
# needs: weft
# seconds: 300
# long: packets lost, doubled and reordered at 0.1, 1 and 5 %; otherwise at 1 %, and fewer MSG transfers
# Both guests lose, double and reorder packets (`tc netem`). MSG endpoints: numbered messages of both
# sides, several at once, and messages and RMA one at a time, every byte compared. RDM endpoints:
# flow, messages and atomics of both sides at once, each of which must arrive once, in order and
# unchanged. Without reads beside other operations: rxe of Linux 7.2.13 completes such a read with
# success although its bytes have not arrived (docs/real-verbs.md).
RATES=1
[ -n "$WEFT_VM_LONG" ] && RATES="0.1 1 5"

dropped() { tc -s qdisc show dev "$(rxe_dev)" | sed -n 's/.*(dropped \([0-9]*\),.*/\1/p'; }

lossy() {
	modprobe sch_netem || return 1
	number=0
	for rate in $RATES; do
		tc qdisc add dev "$(rxe_dev)" root netem delay 1ms loss "$rate%" duplicate "$rate%" reorder "$rate%" || return 1
		signal "lossy-$WEFT_PAIR-$rate"
		await "lossy-$other-$rate" 60 || return 1
		echo "== RDM, $rate %"
		FI_WEFT_DEVICE=rxe0 with weft "$WEFT_PROJECT/build/vm/flow" -r weft "$(rxe_addr4)" "$(peer_addr4)" 5001 4 || return 1
		tests=transfer
		[ -n "$WEFT_VM_LONG" ] && tests="transfer reads"
		if [ $rate = 5 ]; then
			# 64 packets of a message at 5 %: rxe's 6 retries do not suffice, and the connection ends with
			# FI_ETIMEDOUT. It does not end with 7, which rxe takes as unlimited.
			tests=reads
			export FI_WEFT_RETRY_COUNT=7
		fi
		for test in $tests; do
			count=10
			[ $test = reads ] && count=200
			number=$((number + 1))
			echo "== MSG, $rate %, $test"
			if [ "$WEFT_PAIR" = b ]; then
				with weft "$FIPEER" -s -p weft -d rxe0 -P "185$((10 + number))" -n "$count" -m send $test "$(rxe_addr4)" || return 1
			else
				with weft "$FIPEER" -p weft -d rxe0 -P "185$((10 + number))" -n "$count" -m send $test "$(peer_addr4)" || return 1
			fi
		done
		echo "$(dropped) packets dropped"
		[ "$(dropped)" -ge 1 ] || return 1
		tc qdisc del dev "$(rxe_dev)" root
	done
}

disturbed() {
	lossy
	status=$?
	tc qdisc del dev "$(rxe_dev)" root 2>/dev/null
	return $status
}
a() { other=b; disturbed; }
b() { other=a; disturbed; }
