# The checks after each case can fail: a planted kernel warning and an object that a program holds
# in the device are both detected.
run() {
	kernel_log_clean || return 1
	echo 'weft test: WARNING: planted' >/dev/kmsg
	kernel_log_clean && { echo "a warning in the kernel log went unseen"; return 1; }
	dmesg --clear
	resources_gone || return 1
	"$FIPEER" -s -p verbs -d rxe0 transfer 10.77.0.1 >/dev/null 2>&1 &
	tries=0
	while [ -z "$(user_resources)" ] && [ $tries -lt 50 ]; do
		sleep 0.2
		tries=$((tries + 1))
	done
	user_resources
	[ -n "$(user_resources)" ] || { echo "a program's objects went unseen"; return 1; }
	kill -9 $!
	wait
	resources_gone
}
