# guest: old
# needs: weft
# seconds: 90
# With rdma-core 44 weft lists rxe0, transfers data, and its table shows that advise and flush are
# missing.
run() {
	with weft fi_info -p weft | grep -q 'domain: rxe0' || { with weft fi_info -p weft; return 1; }
	pingpong weft 10.77.0.1 -I 5 -S 4096 || return 1
	FI_LOG_LEVEL=info fipeer_both weft weft fd77::1 transfer >/tmp/out 2>&1 || { tail -30 /tmp/out; return 1; }
	grep -q 'transfer: ok' /tmp/out || return 1
	grep -i weft /tmp/out | grep -iE 'advise|flush' || { echo "no table"; grep -i weft /tmp/out | tail -20; return 1; }
	# the features are refused, and weft relies on none of them
	grep -q 'advise: prefetch  *refused' /tmp/out && grep -q 'flush: global visibility  *refused' /tmp/out
}
