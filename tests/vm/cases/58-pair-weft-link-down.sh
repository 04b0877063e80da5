# guest: pair
# needs: weft
# seconds: 90
# The link goes down under transfers: both sides have FI_SHUTDOWN within ten seconds. Transfers
# after the link is up again are not tested: with Linux 7.2.13 no connection between the guests
# succeeds once a link went down and up under one. libfabric's own verbs provider, in weft's place
# in this file, times out in the same way, also five seconds after the port is active again.
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
	rxe_wait && [ $status -eq 0 ]
}
