# guest: pair
# needs: weft
# seconds: 240
# long: an outage that the device bridges too
# The network between two guests loses everything under RDM traffic: for 6 s, after which the link has
# broken and weft connects again, and for 1 s, which the device's retries bridge. No message and no
# atomic is lost or doubled. The interfaces stay up. If rxe0's port goes down, by the interface or by
# its carrier, and the connection manager sends a packet then, rxe's queue pair 1 is in the error
# state until the device is created again: no connection succeeds any more, with any library
# (docs/real-verbs.md; 58-pair-weft-link-down shows the state). The same happens if the connection
# manager sends a packet while tc adds or deletes a queueing discipline, so netem is there, without
# loss, before the first packet and until the last one, and only its loss changes.
#
# Operations fail 8.5 s after the last sign of life of a silent peer, and a dial takes up to 2 s of
# that (docs/protocol-rdm.md), so the outage must not last much longer than 6 s. A guest with a tenth
# of a processor needs seconds to start a program: one tc reads both changes from a pipe, and the
# shell waits by itself. The length is measured. If the traffic has failed and the outage lasted
# longer than 6.5 s, nothing is shown, and it is repeated with a limit of 51 s.
pause() { sed -n 's/.*longest pause \([0-9]*\).*/\1/p' /tmp/flow; }

outage() { # SECONDS [TRY]
	try=${2:-1}
	signal "outage-$WEFT_PAIR-$1-$try"
	await "outage-$other-$1-$try" 60 || return 1
	dev=$(rxe_dev)
	tc qdisc replace dev "$dev" root netem limit 10000 loss 0% || return 1
	exec 9> >(tc -batch -)
	tc=$!
	: >/tmp/flow
	FI_WEFT_DEVICE=rxe0 with_exec weft "$WEFT_PROJECT/build/vm/flow" -r weft "$(rxe_addr4)" "$(peer_addr4)" 5001 $((4 + $1)) >/tmp/flow 2>&1 8>&- 9>&- &
	flow=$!
	await_flow
	uptime_is
	begin=$now
	echo "qdisc change dev $dev root netem limit 10000 loss 100%" >&9
	rest "$1"
	echo "qdisc change dev $dev root netem limit 10000 loss 0%" >&9
	exec 9>&-
	wait $tc || return 1
	uptime_is
	lasted=$((now - begin))
	wait $flow
	status=$?
	tc qdisc del dev "$dev" root
	echo "== $1 s: an outage of $lasted tenths of a second"
	cat /tmp/flow
	echo "$status $lasted" >"/xchg/flow-$WEFT_PAIR"
	mv "/xchg/flow-$WEFT_PAIR" "/xchg/signal-flow-$WEFT_PAIR-$1-$try"
	await "flow-$other-$1-$try" 90 || return 1
	read -r its_status its_lasted <"/xchg/signal-flow-$other-$1-$try"
	if [ $((status + its_status)) != 0 ]; then
		[ $((lasted > its_lasted ? lasted : its_lasted)) -gt $(($1 * 10 + 5)) ] && [ "$try" = 1 ] || return 1
		echo "the outage lasted too long, $lasted and $its_lasted tenths of a second: once more"
		FI_WEFT_CONNECT_TIMEOUT=60 outage "$1" 2
		return
	fi
	[ "$(pause)" -ge "$1" ] || { echo "the traffic has not paused: nothing was tested"; return 1; }
}

both() {
	can_rest || return 1
	modprobe sch_netem && outage 6 && { [ -z "$WEFT_VM_LONG" ] || outage 1; }
}
a() { other=b; both; }
b() { other=a; both; }
