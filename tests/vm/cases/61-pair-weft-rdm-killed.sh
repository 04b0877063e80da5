# guest: pair
# needs: weft
# seconds: 150
# kill-b: 3
# The other guest is powered off under traffic of RDM endpoints: messages, atomics, writes and reads
# in both directions. Every operation to its process must complete in error within ten seconds, with
# the default connect timeout, while the traffic with a third process, in guest a, continues.
b() {
	FI_WEFT_DEVICE=rxe0 with_exec weft "$WEFT_PROJECT/build/vm/outlive" weft "$(rxe_addr4)" 5003 "$(peer_addr4):5001" &
	wait
}
a() {
	export FI_WEFT_DEVICE=rxe0
	address=$(rxe_addr4)
	with_exec weft "$WEFT_PROJECT/build/vm/outlive" weft "$address" 5002 "$address:5001" >/tmp/stays 2>&1 &
	stays=$!
	with_exec weft "$WEFT_PROJECT/build/vm/outlive" -s -T 10 weft "$address" 5001 "$address:5002" "$(peer_addr4):5003" >/tmp/survivor 2>&1 &
	survivor=$!
	tries=0
	while ! grep -q running /tmp/survivor && [ -e /proc/$survivor ] && [ $tries -lt 300 ]; do
		sleep 0.2
		tries=$((tries + 1))
	done
	signal running
	wait $survivor
	status=$?
	wait $stays
	other=$?
	cat /tmp/survivor
	sed 's/^/the peer that stays: /' /tmp/stays
	[ $status = 0 ] && [ $other = 0 ]
}
