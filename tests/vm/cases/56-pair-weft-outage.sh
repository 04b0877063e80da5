# guest: pair
# needs: weft
# seconds: 150
# long: an outage that the device bridges too
# The network between two guests loses everything under RDM traffic: for 6 s, after which the link has
# broken and weft connects again, and for 1 s, which the device's retries bridge. No message and no
# atomic is lost or doubled. The interfaces stay up. If rxe0's port goes down, by the interface or by
# its carrier, and the connection manager sends a packet then, rxe's queue pair 1 is in the error
# state until the device is created again: no connection succeeds any more, with any library
# (docs/real-verbs.md; 58-pair-weft-link-down shows the state). The same happens if the connection
# manager sends a packet while tc adds or deletes a queueing discipline, so netem is there, without
# loss, before the first packet and until the last one, and only its loss changes.
pause() { sed -n 's/.*longest pause \([0-9]*\).*/\1/p' /tmp/flow; }

outage() { # SECONDS
	signal "outage-$WEFT_PAIR-$1"
	await "outage-$other-$1" 60 || return 1
	tc qdisc replace dev "$(rxe_dev)" root netem limit 10000 loss 0% || return 1
	FI_WEFT_DEVICE=rxe0 with_exec weft "$WEFT_PROJECT/build/vm/flow" -r weft "$(rxe_addr4)" "$(peer_addr4)" 5001 $((4 + $1)) >/tmp/flow 2>&1 &
	flow=$!
	tries=0
	while ! grep -q begins /tmp/flow && [ $tries -lt 200 ]; do
		tries=$((tries + 1))
		sleep 0.1
	done
	sleep 1
	tc qdisc change dev "$(rxe_dev)" root netem limit 10000 loss 100%
	sleep "$1"
	tc qdisc change dev "$(rxe_dev)" root netem limit 10000 loss 0%
	wait $flow
	status=$?
	tc qdisc del dev "$(rxe_dev)" root
	echo "== $1 s"
	cat /tmp/flow
	[ $status = 0 ] || return 1
	[ "$(pause)" -ge "$1" ] || { echo "the traffic has not paused: nothing was tested"; return 1; }
}

both() { modprobe sch_netem && outage 6 && { [ -z "$WEFT_VM_LONG" ] || outage 1; }; }
a() { other=b; both; }
b() { other=a; both; }
