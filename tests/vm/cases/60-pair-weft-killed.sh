# guest: pair
# needs: weft
# seconds: 120
# kill-b: 3
# The other guest is powered off while three connections are busy, one sending, one writing, one
# only receiving. Within ten seconds each must have FI_SHUTDOWN, and every posted operation must
# have completed, in error.
port() { case $1 in send) echo 18601 ;; write) echo 18602 ;; recv) echo 18603 ;; esac }
b() {
	for mode in send write recv; do
		with_exec weft "$FIPEER" -s -p weft -d rxe0 -P "$(port $mode)" -m $mode -T 90 survive "$(rxe_addr4)" &
	done
	wait
}
a() {
	for mode in send write recv; do
		with_exec weft "$FIPEER" -p weft -d rxe0 -P "$(port $mode)" -m $mode -T 10 survive "$(peer_addr4)" >/tmp/survivor-$mode 2>&1 &
	done
	for mode in send write recv; do
		tries=0
		while ! grep -q connected /tmp/survivor-$mode && [ $tries -lt 200 ]; do
			sleep 0.2
			tries=$((tries + 1))
		done
	done
	signal running
	wait
	cat /tmp/survivor-*
	[ "$(grep -l 'survive: ok' /tmp/survivor-* | wc -l)" -eq 3 ]
}
