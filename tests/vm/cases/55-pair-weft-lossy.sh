# guest: pair
# needs: weft
# seconds: 900
# long: packets lost, doubled and reordered at 0.1, 1 and 5 %; otherwise at 1 %, and fewer MSG transfers
# Both guests lose, double and reorder packets (`tc netem`), all of it at once and each alone. RDM
# endpoints: flow, messages and atomics of both sides at once, each of which must arrive once, in
# order and unchanged. MSG endpoints: numbered messages of both sides, several at once, and messages
# and RMA one at a time, every byte compared. Without reads beside other operations: rxe of Linux
# 7.2.13 completes such a read with success although its bytes have not arrived
# (docs/real-verbs.md). Each part is repeated until it has met such a packet: netem counts those that
# it drops, and the device of the receiver counts requests that arrive again or too early.
RATES=1
[ -n "$WEFT_VM_LONG" ] && RATES="0.1 1 5"
COUNTERS=/sys/class/infiniband/rxe0/ports/1/hw_counters

met() { # PART
	case $1 in
	loss | all) tc -s qdisc show dev "$(rxe_dev)" | sed -n 's/.*(dropped \([0-9]*\),.*/\1/p' ;;
	duplicate) cat $COUNTERS/duplicate_request ;;
	reorder) cat $COUNTERS/out_of_seq_request ;;
	esac
}

# Sets `both` to the sum of a number over both guests, which is the same in both; waits for the other
# one.
step=0
sum() {
	step=$((step + 1))
	echo "$1" >"/xchg/sum-$WEFT_PAIR"
	mv "/xchg/sum-$WEFT_PAIR" "/xchg/signal-sum-$WEFT_PAIR-$step"
	await "sum-$other-$step" 90 || return 1
	both=$(($1 + $(cat "/xchg/signal-sum-$other-$step")))
}

rdm() { # SECONDS
	FI_WEFT_DEVICE=rxe0 with weft "$WEFT_PROJECT/build/vm/flow" -r weft "$(rxe_addr4)" "$(peer_addr4)" 5001 "$1"
}

number=0
msg() { # TEST ITERATIONS
	number=$((number + 1))
	if [ "$WEFT_PAIR" = b ]; then
		with weft "$FIPEER" -s -p weft -d rxe0 -P "185$((10 + number))" -n "$2" -m send "$1" "$(rxe_addr4)"
	else
		with weft "$FIPEER" -p weft -d rxe0 -P "185$((10 + number))" -n "$2" -m send "$1" "$(peer_addr4)"
	fi
}

part() { # loss|duplicate|reorder|all RATE
	case $1 in
	reorder) disturbance="delay 1ms reorder $2%" ;;
	all) disturbance="delay 1ms loss $2% duplicate $2% reorder $2%" ;;
	*) disturbance="$1 $2%" ;;
	esac
	# no packet is on the way: both are before the next step
	# shellcheck disable=SC2086 # words
	tc qdisc change dev "$(rxe_dev)" root netem limit 10000 $disturbance || return 1
	seconds=2
	[ "$1" = all ] && seconds=4
	before=$(met "$1")
	sum 0 || return 1
	# at 0.1 %, 5 tries of a slow guest have about one such packet
	for try in {1..40}; do
		echo "== $1, $2 %: RDM"
		rdm $seconds || return 1
		if [ $try = 1 ]; then
			messages "$1" "$2" || return 1
		fi
		here=$(($(met "$1") - before))
		sum $here || return 1
		echo "$here such packets here, $both on both sides"
		[ "$both" -ge 1 ] && return 0
	done
	echo "no packet met what is tested"
	return 1
}

messages() {
	[ "$1" = all ] || [ -n "$WEFT_VM_LONG" ] || return 0
	if [ "$1-$2" = all-5 ]; then
		# 64 packets of a message at 5 %: rxe's 6 retries do not suffice, and the connection ends with
		# FI_ETIMEDOUT. It does not end with 7, which rxe takes as unlimited.
		export FI_WEFT_RETRY_COUNT=7
	else
		unset FI_WEFT_RETRY_COUNT
	fi
	if [ "$1" = all ] && [ "$2" != 5 ]; then
		echo "== $1, $2 %: MSG, transfer"
		msg transfer 10 || return 1
		[ -n "$WEFT_VM_LONG" ] || return 0
	fi
	echo "== $1, $2 %: MSG, several at once"
	msg reads 200
}

lossy() {
	modprobe sch_netem && tc qdisc add dev "$(rxe_dev)" root netem limit 10000 || return 1
	for rate in $RATES; do
		for kind in all duplicate reorder; do
			part $kind "$rate" || return 1
		done
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
