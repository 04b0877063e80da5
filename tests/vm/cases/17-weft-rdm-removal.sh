# needs: weft
# seconds: 120
# The device is removed under RDM traffic: both sides get error completions, none hangs, the removal
# ends with the two processes, and traffic over a device that is created again is correct.
flow() { # NODE PEER SECONDS
	FI_WEFT_CONNECT_TIMEOUT=3 FI_WEFT_DEVICE=rxe0 with_exec weft "$WEFT_PROJECT/build/vm/flow" weft "$1" "$2" 5001 "$3"
}

run() {
	ip addr add 10.77.0.2/24 dev v0
	sleep 1
	flow 10.77.0.1 10.77.0.2 60 >/tmp/first 2>&1 &
	first=$!
	flow 10.77.0.2 10.77.0.1 60 >/tmp/second 2>&1 &
	second=$!
	tries=0
	while ! { grep -q begins /tmp/first && grep -q begins /tmp/second; } && [ $tries -lt 100 ]; do
		sleep 0.2
		tries=$((tries + 1))
	done
	sleep 1
	start=$(date +%s)
	timeout 60 rdma link delete rxe0 &
	delete=$!
	wait $first
	wait $second
	wait $delete
	delete_status=$?
	seconds=$(($(date +%s) - start))
	cat /tmp/first /tmp/second
	echo "removal: status $delete_status after $seconds s"
	[ -e /sys/class/infiniband/rxe0 ] && { echo "rxe0 is still there"; return 1; }
	rxe_up || return 1
	[ $delete_status = 0 ] && [ $seconds -le 40 ] || return 1
	grep -q 'begins' /tmp/first && grep -q 'begins' /tmp/second || return 1
	grep -qE ': error [0-9]' /tmp/first && grep -qE ': error [0-9]' /tmp/second || return 1
	flow 10.77.0.1 10.77.0.2 2 &
	first=$!
	(flow 10.77.0.2 10.77.0.1 2) || return 1
	wait $first
	status=$?
	ip addr del 10.77.0.2/24 dev v0
	return $status
}
