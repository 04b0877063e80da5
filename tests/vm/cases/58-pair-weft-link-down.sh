# guest: pair
# needs: weft
# seconds: 90
# The link goes down under transfers: both sides are told within ten seconds. Then it comes back and works again.
b() {
	with_exec weft "$FIPEER" -s -p weft -d rxe0 -T 40 survive "$(rxe_addr4)" >/tmp/victim 2>&1 &
	wait $!
	cat /tmp/victim
	grep -q 'victim: told by' /tmp/victim || return 1
	signal told
	pair_fipeer_server weft "$(rxe_addr4)" 9
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
	await told 60 && [ $status -eq 0 ] && pair_fipeer_client weft "$(peer_addr4)" 9
}
