# guest: pair
# needs: weft
# seconds: 150
# long: an interface that is down for 5 s too
# The interface of guest a goes down and up under RDM traffic. No message and no atomic is lost or
# doubled: weft sends no disconnect request while the port is down, which would end all connections
# to come (58-pair-weft-link-down, docs/real-verbs.md), and connects again when it is up. Queue pair
# 1, of the connection manager, is not in its error state afterwards.
pause() { sed -n 's/.*longest pause \([0-9]*\).*/\1/p' /tmp/flow; }

flap() { # SECONDS
	signal "flap-$WEFT_PAIR-$1"
	await "flap-$other-$1" 60 || return 1
	FI_WEFT_DEVICE=rxe0 with_exec weft "$WEFT_PROJECT/build/vm/flow" -r weft "$(rxe_addr4)" "$(peer_addr4)" 5001 $((4 + $1)) >/tmp/flow 2>&1 &
	flow=$!
	tries=0
	while ! grep -q begins /tmp/flow && [ $tries -lt 200 ]; do
		tries=$((tries + 1))
		sleep 0.1
	done
	sleep 1
	if [ "$WEFT_PAIR" = a ]; then
		ip link set "$(rxe_dev)" down
		sleep "$1"
		ip link set "$(rxe_dev)" up
	fi
	wait $flow
	status=$?
	echo "== $1 s"
	cat /tmp/flow
	gsi=$(rdma resource show qp link rxe0/1 | grep -o 'type GSI state [A-Z]*')
	echo "queue pair 1: $gsi"
	[ $status = 0 ] && [ "$gsi" = "type GSI state RTS" ] || return 1
	[ "$(pause)" -ge "$1" ] || { echo "the traffic has not paused: nothing was tested"; return 1; }
}

both() { flap 1 && { [ -z "$WEFT_VM_LONG" ] || flap 5; }; }
a() { other=b; both; }
b() { other=a; both; }
