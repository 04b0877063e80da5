# guest: pair
# needs: weft fabtests
# seconds: 240
# fabtests of endpoints with many peers between two hosts, with verified data.
FAB=$WEFT_PROJECT/build/vm/fabtests/bin
native() {
	export FI_WEFT_RDM=1 FI_WEFT_DEVICE=rxe0 FI_PROVIDER_PATH="$WEFT_DIR" FI_PROVIDER=^ofi_rxm
	exec "$@"
}
TESTS="pingpong tagged_pingpong tagged_bw"
b() {
	for test in $TESTS; do
		(native "$FAB/fi_rdm_$test" -p weft -I 5 -v -s "$(rxe_addr4)") &
		# the connection manager's port of the endpoint is no TCP port
		sleep 3
		signal "rdm-$test"
		wait $! || return 1
	done
}
a() {
	for test in $TESTS; do
		await "rdm-$test" 120 && (native "$FAB/fi_rdm_$test" -p weft -I 5 -v -s "$(rxe_addr4)" "$(peer_addr4)") || return 1
	done
}
