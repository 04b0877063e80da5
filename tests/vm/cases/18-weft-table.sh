# needs: weft
# The results of weft's tests of the device are printed as one table at FI_LOG_LEVEL=info. rxe of
# rdma-core 61 or newer has advise and flush, but no rereg and no window bounds. It has on-demand
# regions, but on Linux 7.2.13 each access to one goes to the start of its page, and succeeds: there
# they must not count as working. An on-demand region at another iova is not tried at all: each
# access makes this kernel read, and sometimes write, outside its own list of pages, and one such
# access caused a panic. An older kernel (`check --kernel`) refuses on-demand regions and advice.
run() {
	FI_LOG_LEVEL=info fipeer_both weft weft 10.77.0.1 transfer >/tmp/out 2>&1 || { tail -30 /tmp/out; return 1; }
	grep -i 'weft' /tmp/out | grep -iE 'on-demand|advise|flush|window|rereg' || { echo "no table"; grep -i weft /tmp/out | tail -20; return 1; }
	for what in on-demand advise flush window rereg; do
		grep -i weft /tmp/out | grep -qi "$what" || { echo "nothing on $what"; return 1; }
	done
	if has_on_demand; then
		grep -q 'untouched memory  *accepted, but fails' /tmp/out && grep -q 'another iova  *not tried' /tmp/out &&
			grep -q 'advise: prefetch  *works' /tmp/out || return 1
	else
		grep -q 'untouched memory  *refused' /tmp/out && grep -q 'advise: prefetch  *refused' /tmp/out || return 1
	fi
	grep -q 'flush: global visibility  *works' /tmp/out && grep -q 'flush: persistence  *refused' /tmp/out &&
		grep -q 'rereg: change of access  *refused' /tmp/out && grep -q 'bounds enforced  *accepted, but fails' /tmp/out
}
