# needs: weft
# The device is removed under a connection: FI_SHUTDOWN and error completions on both sides, both
# close, the removal ends (rxe waits until the last program has closed the device), and a device
# created again works.
run() {
	with_exec weft "$FIPEER" -s -p weft -d rxe0 -T 15 watch 10.77.0.1 >/tmp/server 2>&1 &
	server=$!
	with_exec weft "$FIPEER" -p weft -d rxe0 -T 15 watch 10.77.0.1 >/tmp/client 2>&1 &
	client=$!
	tries=0
	while ! { grep -q connected /tmp/server && grep -q connected /tmp/client; } && [ $tries -lt 100 ]; do
		sleep 0.2
		tries=$((tries + 1))
	done
	timeout 30 rdma link delete rxe0 &
	delete=$!
	wait $server
	server_status=$?
	wait $client
	client_status=$?
	wait $delete
	delete_status=$?
	sed 's/^/server: /' /tmp/server
	sed 's/^/client: /' /tmp/client
	echo "server $server_status, client $client_status, removal $delete_status"
	[ -e /sys/class/infiniband/rxe0 ] && { echo "rxe0 is still there"; return 1; }
	rxe_up || return 1
	[ $server_status$client_status$delete_status = 000 ] && fipeer_both weft weft 10.77.0.1 transfer
}
