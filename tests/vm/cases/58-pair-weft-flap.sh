# guest: pair
# needs: weft
# seconds: 240
# long: an interface that is down for 5 s too
# The interface of guest a goes down and up under RDM traffic. No message and no atomic is lost or
# doubled: weft sends no disconnect request while the port is down, which would end all connections
# to come (58-pair-weft-link-down, docs/real-verbs.md), and connects again when it is up. Queue pair
# 1, of the connection manager, is not in its error state afterwards.
#
# As in 56-pair-weft-outage, operations fail if the interface is down much longer than 6 s, and a guest
# with a tenth of a processor needs seconds to start a program: one ip makes both changes, and their
# distance is measured. If the traffic has failed and it was longer than 6.5 s, nothing is shown, and
# it is repeated with a limit of 51 s.
pause() { sed -n 's/.*longest pause \([0-9]*\).*/\1/p' /tmp/flow; }

flap() { # SECONDS [TRY]
	try=${2:-1}
	signal "flap-$WEFT_PAIR-$1-$try"
	await "flap-$other-$1-$try" 60 || return 1
	dev=$(rxe_dev)
	exec 9> >(ip -batch -)
	ip=$!
	: >/tmp/flow
	FI_WEFT_DEVICE=rxe0 with_exec weft "$WEFT_PROJECT/build/vm/flow" -r weft "$(rxe_addr4)" "$(peer_addr4)" 5001 $((4 + $1)) >/tmp/flow 2>&1 8>&- 9>&- &
	flow=$!
	await_flow
	uptime_is
	begin=$now
	if [ "$WEFT_PAIR" = a ]; then
		echo "link set $dev down" >&9
		rest "$1"
		echo "link set $dev up" >&9
	fi
	exec 9>&-
	wait $ip || return 1
	uptime_is
	lasted=$((now - begin))
	wait $flow
	status=$?
	[ "$WEFT_PAIR" = a ] && echo "== $1 s: down for $lasted tenths of a second"
	cat /tmp/flow
	gsi=$(rdma resource show qp link rxe0/1 | grep -o 'type GSI state [A-Z]*')
	echo "queue pair 1: $gsi"
	echo "$status $lasted" >"/xchg/down-$WEFT_PAIR"
	mv "/xchg/down-$WEFT_PAIR" "/xchg/signal-down-$WEFT_PAIR-$1-$try"
	await "down-$other-$1-$try" 90 || return 1
	[ "$gsi" = "type GSI state RTS" ] || return 1
	read -r its_status its_lasted <"/xchg/signal-down-$other-$1-$try"
	if [ $((status + its_status)) != 0 ]; then
		[ "$WEFT_PAIR" = a ] || lasted=$its_lasted
		[ "$lasted" -gt 65 ] && [ "$try" = 1 ] || return 1
		echo "the interface was down for too long, $lasted tenths of a second: once more"
		FI_WEFT_CONNECT_TIMEOUT=60 flap "$1" 2
		return
	fi
	[ "$(pause)" -ge "$1" ] || { echo "the traffic has not paused: nothing was tested"; return 1; }
}

both() { can_rest && flap 1 && { [ -z "$WEFT_VM_LONG" ] || flap 5; }; }
a() { other=b; both; }
b() { other=a; both; }
