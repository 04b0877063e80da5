# guest: pair
# needs: weft fabtests
# seconds: 120
# kill-b: 5
# The other guest is powered off while it receives messages of an endpoint with many peers. Within
# 10 s the sender must have an error completion.
native() {
	export FI_WEFT_RDM=1 FI_WEFT_DEVICE=rxe0 FI_PROVIDER_PATH="$WEFT_DIR" FI_PROVIDER=^ofi_rxm
	exec "$WEFT_PROJECT/build/vm/fabtests/bin/$@"
}
b() {
	signal listening
	(native fi_rdm_tagged_bw -p weft -U -I 100000000 -S 4096 -s "$(rxe_addr4)")
}
a() {
	await listening 60 && sleep 5
	(native fi_rdm_tagged_bw -p weft -U -I 100000000 -S 4096 -s "$(rxe_addr4)" "$(peer_addr4)") >/tmp/survivor 2>&1 &
	sleep 5
	kill -0 $! || { cat /tmp/survivor; return 1; }
	signal running
	began=$(date +%s)
	wait $!
	status=$?
	after=$(($(date +%s) - began - 5))
	cat /tmp/survivor
	echo "status $status, $after s after the other guest was powered off"
	# the host looks for the signal each 0.1 s
	[ $status -ne 0 ] && grep -q cq_readerr /tmp/survivor && [ $after -ge 0 ] && [ $after -le 11 ]
}
