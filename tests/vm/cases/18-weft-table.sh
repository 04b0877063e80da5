# needs: weft
# What the device really does is shown as one table at FI_LOG_LEVEL=info, found by trying: rxe of rdma-core 61 or newer
# has advise and flush, no rereg and no window bounds; on-demand regions it has, and on Linux 7.2.13 each access to one
# goes to the start of its page (with success), so they must not count as working where that is so. One at another iova is not even tried: each access
# makes this kernel read and at times write outside its own list of pages, and it panicked of that.
run() {
	FI_LOG_LEVEL=info fipeer_both weft weft 10.77.0.1 transfer >/tmp/out 2>&1 || { tail -30 /tmp/out; return 1; }
	grep -i 'weft' /tmp/out | grep -iE 'on-demand|advise|flush|window|rereg' || { echo "no table"; grep -i weft /tmp/out | tail -20; return 1; }
	for what in on-demand advise flush window rereg; do
		grep -i weft /tmp/out | grep -qi "$what" || { echo "nothing on $what"; return 1; }
	done
	grep -q 'another iova  *not tried' /tmp/out && grep -q 'advise: prefetch  *works' /tmp/out && grep -q 'flush: global visibility  *works' /tmp/out &&
		grep -q 'rereg: change of access  *refused' /tmp/out && grep -q 'bounds enforced  *accepted, but fails' /tmp/out
}
