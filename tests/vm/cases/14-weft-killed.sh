# needs: weft
# seconds: 150
# Programs killed in the middle of transfers leave no objects in the device (case.sh checks this
# after the case), and the next run works.
run() {
	with_exec weft "$FIPEER" -s -p weft -d rxe0 -n 100000 bench 10.77.0.1 >/dev/null 2>&1 &
	server=$!
	with_exec weft "$FIPEER" -p weft -d rxe0 -n 100000 bench 10.77.0.1 >/dev/null 2>&1 &
	client=$!
	await_transfers || return 1
	kill -9 $client $server
	wait
	resources_gone && fipeer_both weft weft 10.77.0.1 transfer
}
