# guest: pmem
# needs: weft
# seconds: 180
# Durable writes (FI_RMA_PMEM, FI_COMMIT_COMPLETE) to persistent memory of the kernel, an NVDIMM
# that QEMU emulates, from MSG and RDM endpoints on rxe0. The completion comes after the kernel has
# written the target's cache lines back; that bytes survive a loss of power can't be shown by
# emulation. rxe refuses to register other memory as persistent. Pages of a file system (fsdax)
# can't be pinned, so the memory is a character device (devdax).
run() {
	modprobe -a nfit nd_pmem dax_pmem device_dax || return 1
	pmem_device || { ls /sys/bus/nd/devices; dmesg | tail -20; return 1; }
	export WEFT_TEST_PMEM=/dev/dax0.0
	fipeer_both weft weft 10.77.0.1 durable >/tmp/out || { cat /tmp/out; return 1; }
	cat /tmp/out
	grep -q '^server: volatile memory: -22$' /tmp/out && grep -q '^durable: ok' /tmp/out || return 1
	# of both processes, none is left
	python3 -c '
import mmap, os
with open(os.environ["WEFT_TEST_PMEM"], "r+b") as device:
    record = mmap.mmap(device.fileno(), 1 << 21)[:14]
print("the device has", record)
assert record == b"weft: durable\0"' || return 1
	FI_WEFT_DEVICE=rxe0 FI_PROVIDER_PATH=$WEFT_DIR FI_PROVIDER=^ofi_rxm WEFT_TEST_PINS=1 WEFT_TEST_SLOW=1 \
		timeout 120 "$WEFT_PROJECT/build/vm/rdm_rma" levels weft 10.77.0.1 auto >/tmp/out 2>&1
	status=$?
	cat /tmp/out
	[ $status = 0 ] && ! grep 'not offered' /tmp/out
}

# Makes the region of persistent memory a character device, as `ndctl create-namespace -m devdax`.
pmem_device() {
	tries=0
	while [ ! -e /sys/bus/nd/devices/namespace0.0 ] && [ $tries -lt 100 ]; do
		sleep 0.1
		tries=$((tries + 1))
	done
	nd=/sys/bus/nd
	echo namespace0.0 >$nd/drivers/nd_pmem/unbind 2>/dev/null
	seed=$(cat $nd/devices/region0/dax_seed)
	echo "seed $seed"
	cat /proc/sys/kernel/random/uuid >"$nd/devices/$seed/uuid" && echo ram >"$nd/devices/$seed/mode" &&
		echo 4096 >"$nd/devices/$seed/align" || return 1
	echo namespace0.0 >"$nd/devices/$seed/namespace" && echo "$seed" >$nd/drivers/dax_pmem/bind || return 1
	tries=0
	while [ ! -e /dev/dax0.0 ] && [ $tries -lt 100 ]; do
		sleep 0.1
		tries=$((tries + 1))
	done
	[ -e /dev/dax0.0 ]
}
