# needs: weft
# seconds: 120
# weft and libfabric's own verbs provider communicate, each as server and as client (MSG, provider
# keys).
run() {
	for address in 10.77.0.1 fd77::1; do
		echo "== $address, server verbs, client weft"
		fipeer_both verbs weft $address transfer || return 1
		echo "== $address, server weft, client verbs"
		fipeer_both weft verbs $address transfer || return 1
	done
	for server in weft verbs; do
		[ $server = weft ] && client=verbs || client=weft
		echo "== fi_pingpong, server $server, client $client"
		with_exec $server fi_pingpong -p $server -d rxe0 -e msg -c -I 5 -S 4096 >/tmp/pp-server 2>&1 &
		await_port 47592 && with $client fi_pingpong -p $client -d rxe0 -e msg -c -I 5 -S 4096 10.77.0.1 || { cat /tmp/pp-server; return 1; }
		wait $! || { cat /tmp/pp-server; return 1; }
	done
}
