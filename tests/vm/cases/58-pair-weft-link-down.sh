# guest: pair
# needs: weft
# seconds: 90
# The link goes down under transfers: both sides have FI_SHUTDOWN within ten seconds. Connections after
# the link is up again are not tested: with Linux 7.2.13 none succeeds until rxe0 is created again,
# because rxe's queue pair 1, of the connection manager, is in the error state since a packet that it
# sent while the port was down (docs/real-verbs.md). The case prints this state, creates rxe0 again
# and transfers data within guest a. libfabric's own verbs provider, in weft's place in this file,
# times out in the same way, also five seconds after the port is active again.
b() {
	with_exec weft "$FIPEER" -s -p weft -d rxe0 -T 40 survive "$(rxe_addr4)" >/tmp/victim 2>&1 &
	wait $!
	cat /tmp/victim
	grep -q 'victim: told by' /tmp/victim
}
a() {
	(
		await running 60
		sleep 2
		ip link set "$(rxe_dev)" down
	) &
	survivor weft send 10
	status=$?
	wait
	ip link set "$(rxe_dev)" up
	rxe_wait || return 1
	echo "queue pair 1: $(rdma resource show qp link rxe0/1 | grep -o 'type GSI state [A-Z]*')"
	rxe_down && rxe_up && fipeer_both weft weft "$(rxe_addr4)" transfer && [ $status -eq 0 ]
}
