# needs: weft
# What the device really does is shown as one table at FI_LOG_LEVEL=info, found by trying: rxe of rdma-core 61 or newer
# has ODP, advise and flush, no rereg and no window bounds.
run() {
	FI_LOG_LEVEL=info fipeer_both weft weft 10.77.0.1 transfer >/tmp/out 2>&1 || { tail -30 /tmp/out; return 1; }
	grep -i 'weft' /tmp/out | grep -iE 'odp|advise|flush|window|rereg' || { echo "no table"; grep -i weft /tmp/out | tail -20; return 1; }
	for what in odp advise flush window rereg; do
		grep -i weft /tmp/out | grep -qi "$what" || { echo "nothing on $what"; return 1; }
	done
}
