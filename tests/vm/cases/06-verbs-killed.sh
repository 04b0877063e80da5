# seconds: 150
# later: it runs nothing of weft
# Programs killed in the middle of transfers leave no objects in the device (case.sh checks this
# after the case).
run() {
	with_exec verbs "$FIPEER" -s -p verbs -d rxe0 -n 100000 bench 10.77.0.1 >/dev/null 2>&1 &
	server=$!
	with_exec verbs "$FIPEER" -p verbs -d rxe0 -n 100000 bench 10.77.0.1 >/dev/null 2>&1 &
	client=$!
	await_transfers || return 1
	kill -9 $client $server
	wait
	resources_gone
}
