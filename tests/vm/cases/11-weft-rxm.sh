# needs: weft
# RDM endpoints of libfabric's ofi_rxm over weft's message endpoints on rxe0, which an application gets
# if it names `weft;ofi_rxm`. ofi_rxm opens one queue for FI_UNIVERSE_SIZE peers (256 unless it is set),
# which would have more entries than a queue of rxe can have (32,767).
run() {
	export FI_WEFT_DEVICE=rxe0 FI_PROVIDER_PATH=$WEFT_DIR FI_UNIVERSE_SIZE=16
	fi_info -p 'weft;ofi_rxm' -d rxe0 | grep -q FI_EP_RDM || { fi_info -p 'weft;ofi_rxm'; return 1; }
	fi_pingpong -p 'weft;ofi_rxm' -d rxe0 -e rdm -c -I 5 -S 65536 >/tmp/server 2>&1 &
	server=$!
	await_port 47592 && fi_pingpong -p 'weft;ofi_rxm' -d rxe0 -e rdm -c -I 5 -S 65536 10.77.0.1 || { cat /tmp/server; return 1; }
	wait $server || { cat /tmp/server; return 1; }
}
